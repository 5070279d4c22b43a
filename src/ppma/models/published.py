"""Published weights by name.

The list is `published.json`, a file of its own so that `ppma weights` can print it without importing torch.
"""

import atexit
import contextlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

_extracted = contextlib.ExitStack()  # files of a zipped package, kept until the process ends
atexit.register(_extracted.close)


@dataclass(frozen=True)
class PublishedWeights:
    """One entry of the list.

    Attributes:
        name: by which the weights are opened, such as "ppma_tiny.authors_in1k".
        task: that the model was trained for.
        data: set that it was trained on.
        backbone: registered name of its backbone.
        parameters: number of parameters of the whole model, with its heads.
        figure: result; that of a file on the Hub is what its authors report.
        license: of the weights.
        repository: on the Hugging Face Hub; None for a file of this package.
        file: path in the repository, or in this package.
        checksum: of the model's output for a fixed image, compared by `ppma weights --verify`; None if unknown.

    Examples:
        >>> PUBLISHED["ppma_tiny.authors_in1k"].figure
        'top-1 82.6'
    """

    name: str
    task: str
    data: str
    backbone: str
    parameters: int
    figure: str
    license: str
    repository: str | None
    file: str
    checksum: float | None


PUBLISHED: dict[str, PublishedWeights] = {
    entry["name"]: PublishedWeights(**entry)
    for entry in json.loads(resources.files("ppma.models").joinpath("published.json").read_text("utf-8"))
}


def local_file(name: str, *, cache_dir: str | Path | None = None) -> Path:
    """The file of published weights, downloaded unless it is in the cache.

    Downloads and cache are those of huggingface_hub: `HF_HOME` sets the folder, `HF_HUB_OFFLINE=1` forbids the network.

    Args:
        name: a key of `PUBLISHED`.
        cache_dir: another cache than huggingface_hub's.

    Raises:
        ConnectionError: the file is neither in the cache nor can it be downloaded.
    """
    weights = PUBLISHED[name]
    if weights.repository is None:
        return _extracted.enter_context(resources.as_file(resources.files("ppma").joinpath(weights.file)))
    import huggingface_hub as hub

    cached = hub.try_to_load_from_cache(weights.repository, weights.file, cache_dir=cache_dir)
    if isinstance(cached, str):  # no request, which would take seconds without a network
        return Path(cached)
    try:
        hub.get_hf_file_metadata(
            hub.hf_hub_url(weights.repository, weights.file)
        )  # fails at once, hf_hub_download retries
        return Path(hub.hf_hub_download(weights.repository, weights.file, cache_dir=cache_dir))
    except Exception as error:  # of huggingface_hub and of its HTTP library, which differs between versions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConnectionError(
            f"{name}: expected {weights.file} of {weights.repository} in the cache or on the Hugging Face Hub, got "
            f"{type(error).__name__}: {reason[:200]}"
        ) from None
