"""The distribution that installs this package: its name, how to install an extra, and a foreign one in its folder."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

DISTRIBUTION = "tiercache-embeddings"
"""The name on package indexes. The distribution named `tiercache` there is an unrelated project."""

_FOREIGN = ("author-email: cornea valentin", "github.com/madtunebk/tiercache")
"""The author and the URL in the metadata of the unrelated distribution. Older checkouts of ours share its name."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package, such as `dask`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def warn_of_foreign_files(folder: Path) -> None:
    """Warn if the unrelated distribution `tiercache` is installed in a folder: both write to `tiercache/`.

    This lists the folder and reads no metadata unless a distribution of that name is there.
    """
    for metadata in folder.glob("tiercache-*.dist-info/METADATA"):
        try:
            header = metadata.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].lower()
        except OSError:  # another process removes it
            continue
        if all(one in header for one in _FOREIGN):
            warnings.warn(
                f"{folder} also has the files of an unrelated distribution, {metadata.parent.name}: run "
                f"`pip uninstall tiercache`, then `pip install --force-reinstall --no-deps {DISTRIBUTION}`",
                RuntimeWarning,
                stacklevel=3,
            )
