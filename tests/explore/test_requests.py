"""Every value of a request is checked on the server: wrong ones get a message, none a traceback or a hang."""

import asyncio
import copy
import functools
import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image

gr = pytest.importorskip("gradio", reason="the explorer needs gradio: pip install 'ppma[explore]'")
from gradio.state_holder import SessionState  # noqa: E402
from gradio.utils import get_upload_folder  # noqa: E402

from ppma.explore import app, images, playground_page, requests, style, view  # noqa: E402

SECONDS = 20  # for one request, on a busy machine
TABLE = {"headers": ["1", "2", "3"], "data": [[0.5, 0.9, 1], [0.1, 0.2, 0.3]], "metadata": None}


@pytest.fixture(scope="module")
def page(nano):
    return app.build(nano, images.find_image("shapes"))


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory):
    """A file that a visitor has uploaded."""
    folder = Path(get_upload_folder()) / tmp_path_factory.mktemp("upload").name
    folder.mkdir(parents=True)
    images.find_image("shapes").save(folder / "shapes.png")
    yield str(folder / "shapes.png")
    (folder / "shapes.png").unlink()
    folder.rmdir()


def valid_data(uploaded):
    """What the page sends to each of its functions."""
    return {
        "click": [None, None],
        "pick": [None],
        "upload_file": [{"path": uploaded, "meta": {"_type": "gradio.FileData"}}, None],
        "fit": [2],
        "change": [None, None, 1, 0, -1, "2d", "paper", True, 2.5],
        "restart": [4, 5, "wall"],
        "redraw": [TABLE, TABLE, 1, 2, 2, 3, "v2h", 4],
        "moved": [3],
    }


def request(page, name, data, index=None):
    function = next(key for key, function in page.fns.items() if function.name == name)
    event = {"index": [100, 200] if name == "click" else 1 if index is None else index, "value": None}
    return {"fn_index": function, "session_hash": "a1b2", "trigger_id": None, "event_data": event, "data": data}


session = functools.cache(SessionState)  # of one visitor


def answer(page, body):
    """What the server answers to a body, without the network: "ok" or the message."""

    async def call(asked):
        event = gr.EventData(None, asked["event_data"])
        answered = page.process_api(page.fns[asked["fn_index"]], asked["data"], session(page), event_data=event)
        await asyncio.wait_for(answered, SECONDS)

    try:
        asked = requests.parse(page, body)
    except ValueError as error:
        return str(error)
    try:
        asyncio.run(call(asked))
    except gr.Error as error:  # anything else would be a traceback on the server
        return error.message
    return "ok"


def test_request_valid(page, uploaded):
    for name, data in valid_data(uploaded).items():
        assert answer(page, json.dumps(request(page, name, data)).encode()) == "ok", name


def test_request_upload_list(page, uploaded):
    file, choice = valid_data(uploaded)["upload_file"]
    for files, said in (([file], "ok"), ([file, file], "upload: expected an uploaded file, got None")):
        assert answer(page, json.dumps(request(page, "upload_file", [files, choice])).encode()) == said


def test_request_every_handler(page, uploaded):
    assert {function.name for function in page.fns.values()} == set(valid_data(uploaded))


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("redraw", 2, 1.5, "query row: expected a whole number from 1 to 8, got 1.5"),
        ("redraw", 3, float("nan"), "query column: expected a whole number from 1 to 8, got nan"),
        ("redraw", 4, None, "key row: expected a whole number from 1 to 8, got None"),
        ("redraw", 5, 10**30, "key column: expected a whole number from 1 to 8, got 1000"),
        ("redraw", 5, 8, "query: expected a token of the 2 x 3 grid"),
        ("redraw", 6, "x", "path: expected one of 'v2h', 'h2v', got 'x'"),
        ("redraw", 7, -1, "step: expected a whole number from 0 to 34, got -1"),
        ("redraw", 0, {"data": [[0.5] * 9] * 2}, "alpha: expected at most 8 x 8 cells, got 2 x 9"),
        ("redraw", 0, {"data": [[0.5] * 3] * 900}, "alpha: expected at most 8 x 8 cells, got 900 x 3"),
        ("redraw", 0, {"data": [[0.5] * 3, [0.5]]}, "alpha: expected 3 cells in row 2 as in the first, got 1"),
        ("redraw", 1, {"data": [[0.5] * 2] * 2}, "beta: expected a table of (2, 3) like alpha, got (2, 2)"),
        ("redraw", 1, {"data": [[[]]]}, "beta: expected a number in each cell, got list"),
        ("redraw", 1, {"data": "abc"}, "beta: expected a table, got dict"),
        ("restart", 0, 9, "rows: expected a whole number from 2 to 8, got 9"),
        ("restart", 1, 2.5, "columns: expected a whole number from 2 to 8, got 2.5"),
        ("restart", 2, "walls", "preset: expected one of"),
        ("moved", 0, "3", "step: expected a whole number from 0 to 34, got '3'"),
        ("fit", 0, 4, "stage: expected a whole number from 0 to 3, got 4"),
        ("change", 2, True, "stage: expected a whole number from 0 to 3, got True"),
        ("change", 3, 7, "block: expected a whole number from 0 to 1, got 7"),
        ("change", 4, 99, "head: expected a whole number from -1 to 1, got 99"),
        ("change", 5, "3d", "mask: expected one of"),
        ("change", 5, "3" * 3000, "mask: expected one of"),
        ("change", 6, 5, "formulation: expected one of"),
        ("change", 7, 1, "decays: expected true or false, got 1"),
        ("change", 8, float("inf"), "strength: expected a number from 0 to 8, got inf"),
        ("change", 8, "a" * 3000, "strength: expected a number from 0 to 8, got 'aaaa"),
        ("upload_file", 0, {"path": "/etc/passwd"}, "upload: expected an uploaded file, got '/etc/passwd'"),
        ("upload_file", 0, {"path": "http://127.0.0.1:9/a.png"}, "upload: expected an uploaded file, got 'http:"),
        ("upload_file", 0, {"path": "a\0b"}, "upload: expected an uploaded file"),
        ("upload_file", 0, {"path": "a" * 9999}, "upload: expected an uploaded file"),
        ("upload_file", 0, None, "upload: expected an uploaded file, got None"),
        ("change", 8, {"path": "http://a", "meta": {"_type": "gradio.FileData"}}, "strength: expected a number or"),
    ],
)
def test_request_wrong_value(name, place, value, message, page, uploaded):
    data = copy.deepcopy(valid_data(uploaded)[name])
    data[place] = value
    said = answer(page, json.dumps(request(page, name, data)).encode())
    assert said.startswith(message)
    assert len(said) < 250
    assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "index", "message"),
    [
        ("click", [1], "click: expected a position x, y in the image"),
        ("click", [1, -5], "y: expected a number from 0 to 480, got -5"),
        ("click", ["x", 5], "x: expected a number from 0 to 480, got 'x'"),
        ("click", [[1], 5], "event_data: expected one or two numbers"),
        ("pick", 99, "sample: expected a whole number from 0 to 4, got 99"),
        ("pick", -1, "sample: expected a whole number from 0 to 4, got -1"),
        ("pick", 0.5, "sample: expected a whole number from 0 to 4, got 0.5"),
    ],
)
def test_request_wrong_click(name, index, message, page, uploaded):
    asked = request(page, name, valid_data(uploaded)[name])
    asked["event_data"] = {"index": index}
    assert answer(page, json.dumps(asked).encode()).startswith(message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("fn_index", 999, "fn_index: expected a function of the page, got 999"),
        ("fn_index", True, "fn_index: expected a function"),
        ("data", [], "data: expected a list of 1 values, got list"),
        ("data", None, "data: expected a list of 1 values, got None"),
        ("session_hash", "../../x", "session_hash: expected up to 40 letters and digits"),
        ("session_hash", "a" * 500, "session_hash: expected up to 40 letters and digits"),
        ("trigger_id", 10**9, "trigger_id: expected a component of the page"),
    ],
)
def test_request_malformed(field, value, message, page):
    asked = request(page, "fit", [2]) | {field: value}
    assert answer(page, json.dumps(asked).encode()).startswith(message)


def test_request_not_json(page):
    for body in (b"", b"\xff\xfe", b"{", b"[" * 50_000, b'{"data": ' + b"9" * 5000 + b"}"):
        assert answer(page, body) == "request: expected JSON"
    assert answer(page, b"[1]") == "request: expected a JSON object, got list"


HOSTILE = [
    *(None, True, False, -1, 0, 0.5, 1e308, 10**30, float("nan"), float("inf"), float("-inf"), "", "x", "0", "NaN"),
    *("a" * 5000, "http://127.0.0.1:9/x", "\0", "../../etc/passwd", [], {}, [[]], [[[]]], [None], {"data": None}),
    {"path": "http://127.0.0.1:9/x", "meta": {"_type": "gradio.FileData"}},
    {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}},
    {"headers": [], "data": [[1] * 90] * 90, "metadata": None},
    {"headers": None, "data": {"a": 1}, "metadata": [1]},
]


def mutate(value, rng):
    """The value with something in it exchanged, dropped or doubled."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        action = rng.random()
        if action < 0.08:
            del value[key]
        elif action < 0.14 and isinstance(value, list):
            value.append(copy.deepcopy(value[key]))
        else:
            value[key] = mutate(value[key], rng)
        return value
    return copy.deepcopy(rng.choice(HOSTILE))


def test_request_mutated(page, uploaded, monkeypatch):
    """250 mutated requests: each has a result or the project's own message, soon."""
    blank = Image.new("RGB", (8, 8))
    monkeypatch.setattr(style, "render", lambda figure, dpi=100: blank)  # slow, and gets no value of a request
    rng, answers = random.Random(0), []
    valid = valid_data(uploaded)
    for number in range(250):
        name = rng.choice(list(valid))
        asked = request(page, name, copy.deepcopy(valid[name]))
        for _ in range(rng.choice((1, 1, 2))):
            part = rng.choice(("data", "data", "event_data", None))
            if part is None:
                asked = mutate(asked, rng)
            else:
                asked[part] = mutate(asked.get(part), rng)
            if not isinstance(asked, dict):
                break
        body = json.dumps(asked).encode()
        if number % 20 == 0:
            body = body[: rng.randrange(len(body))]
        said = answer(page, body)
        assert "\n" not in said, (number, said)
        assert len(said) < 300, (number, said)
        answers.append(said)
    assert 20 < answers.count("ok") < 200  # both kinds were tried


def test_page_queue_limits(page):
    assert page._queue.max_size == app.WAITING
    assert {function.concurrency_limit for function in page.fns.values()} == {1}
    assert len({function.concurrency_id for function in page.fns.values()}) == 1
    assert page.delete_cache == (app.FILES_LIVE, app.FILES_LIVE)


def test_capture_cache_size(nano):
    captures = view.CaptureCache(nano)
    prepared = [torch.full((3, 64, 64), float(n)) for n in range(view.CACHE_SIZE + 2)]
    first = captures(prepared[0])
    assert captures(prepared[0].clone()) is first
    for image in prepared:
        captures(image)
    assert captures._of_bytes.cache_info().currsize == view.CACHE_SIZE
    again = captures(prepared[0])
    assert again is not first
    assert torch.equal(again.records[0].q, first.records[0].q)


def test_last_step_longest_scan():
    largest = playground_page.playground.LARGEST
    ones = [[1.0] * largest] * largest
    *_, count = playground_page.draw(ones, ones, (0, 0), (1, 1), "v2h", playground_page.LAST_STEP)
    assert count - 1 == playground_page.LAST_STEP
