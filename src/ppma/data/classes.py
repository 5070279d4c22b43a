"""Lists of classes, compared."""

from collections.abc import Sequence


def check_classes(classes: Sequence[str], others: Sequence[str], *, found: str, expected: str) -> None:
    """Labels mean the same only where the classes are the same, in the same order."""
    if tuple(classes) == tuple(others):
        return
    lacking = [name for name in others if name not in set(classes)]
    surplus = [name for name in classes if name not in set(others)]
    parts = [
        f"{len(names)} {word} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
        for names, word in ((lacking, "missing"), (surplus, "not expected"))
        if names
    ]
    raise ValueError(
        f"classes: {found} has {len(classes)} and {expected} {len(others)}: {'; '.join(parts) or 'in another order'}"
    )
