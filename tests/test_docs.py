"""Documents quote the code truthfully, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code() -> str:
    """All sources with adjacent string literals joined, as the interpreter joins them."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def quotes() -> list[str]:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.mark.parametrize("quote", [q for q in quotes() if q != "stats.notes"])
def test_messages_in_troubleshooting_exist(quote):
    assert quote in code()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_readme_tree_names_every_module():
    tree = (ROOT / "README.md").read_text()
    for path in (ROOT / "src/verkv").glob("*.py"):
        assert path.name == "__init__.py" or path.name in tree, path.name
