"""Write the tutorials that are notebooks too, from their pages: text becomes Markdown cells, Python becomes code cells.

python tools/notebooks.py
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {
    ROOT / "examples" / "notebooks" / f"{name.replace('-', '_')}.ipynb": ROOT / "docs" / "tutorials" / f"{name}.md"
    for name in ("first-mask", "own-vit")
}


def notebook(page: str) -> str:
    """The JSON of a notebook (nbformat 4.5), without outputs."""
    cells = []
    for index, part in enumerate(re.split(r"```python\n(.*?)```\n", page, flags=re.DOTALL)):
        text = part.strip()
        if index % 2 == 0:  # links of the site lead nowhere in a notebook
            text = re.sub(r"\[([^\]]+)\]\((?!http)[^)]+\)", r"\1", text)
        if text:
            cell = {"id": f"cell-{len(cells)}", "metadata": {}, "source": text.splitlines(keepends=True)}
            code = {"cell_type": "code", "execution_count": None, "outputs": []}
            cells.append({**cell, **(code if index % 2 else {"cell_type": "markdown"})})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for target, page in NOTEBOOKS.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(notebook(page.read_text()))
