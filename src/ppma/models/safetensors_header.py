"""The header of a safetensors file, in one order: equal weights and metadata make equal files."""

import json

_LENGTH = 8  # bytes of the header's length, little-endian; the header itself is padded to a multiple of as many


def sort_metadata(content: bytes) -> bytes:
    """The same file with its metadata sorted; safetensors writes them in an order that differs between processes."""
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    header = json.loads(content[_LENGTH:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text + content[end:]
