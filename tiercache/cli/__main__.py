"""``python -m tiercache.cli`` is ``tiercache``."""

from tiercache.cli import main

main()
