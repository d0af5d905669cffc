"""The licence of a model or an adapter, as far as its folder says."""

from pathlib import Path

UNKNOWN = "unknown"


def licence(*folders: Path | None) -> str:
    """What the first folder that says something says: its card, or LICENSE in its first line."""
    for folder in folders:
        if folder and (found := _of_card(folder) or _of_text(folder)):
            return found
    return UNKNOWN


def _of_card(folder: Path) -> str:
    """The licence in the front matter of README.md."""
    import yaml

    path = folder / "README.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not text.startswith("---\n"):
        return ""
    try:
        front = yaml.safe_load(text[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return ""
    found = front if isinstance(front, dict) else {}
    named = found.get("license_name") if found.get("license") == "other" else found.get("license")
    return str(named or found.get("license") or "")


def _of_text(folder: Path) -> str:
    for path in sorted(folder.glob("LICENSE*")):
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            return next((line.strip() for line in lines if line.strip()), "")
    return ""
