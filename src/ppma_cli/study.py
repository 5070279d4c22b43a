"""Running a study, for `ppma ablate` and `ppma compare`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppma.tasks.study import Study


def run_study(study: "Study", *, latex: bool = False) -> int:
    """Train what is missing and print the table, also of the finished runs if a later one fails."""
    from ppma.engine.errors import StoppedError

    try:
        study.run()
    except StoppedError as stopped:
        raise StoppedError("stopped; run the same command again to continue", stopped.signal) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "interrupted; run the same command again to continue from the latest checkpoint"
        ) from None
    finally:
        if study.results():
            print(study.latex() if latex else study.table())
            print(f"\nwrote {', '.join(map(str, study.files))}")
    return 0
