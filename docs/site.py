"""Additions to the pages for the site: README.md as the first page, and new targets for links that leave docs/.

Pages link to files of the tree by relative paths, because the code host needs such paths. Here the path is replaced by
a link to the same page of the site, or by a link to the code host if the site has no such page. A link to a missing
file stays unchanged, and a strict build fails because of it.
"""

import re
from pathlib import Path
from posixpath import normpath, relpath

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Pages of the site that stand outside docs/.
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files, config):
    """Add the pages that stand outside docs/."""
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links to files of the tree into links of the site."""
    here = page.file.src_uri
    source = next((name for name, generated in OUTSIDE.items() if generated == here), f"docs/{here}")

    def rewritten(match):
        target = match[2]
        if "://" in target or target.startswith(("mailto:", "/")):
            return match[0]
        path = normpath(f"{source.rpartition('/')[0]}/{target}".lstrip("/"))
        if path in OUTSIDE or path.startswith("docs/"):
            there = OUTSIDE.get(path, path.removeprefix("docs/"))
            return match[1] + relpath(there, here.rpartition("/")[0] or ".") + match[3]
        if not (ROOT / path).exists():
            return match[0]
        return f"{match[1]}{config.repo_url}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{match[3]}"

    return _LINK.sub(rewritten, markdown)
