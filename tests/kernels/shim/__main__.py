"""Compiles every kernel source for the CPU, before several test processes need it: nothing without g++."""

import shutil
from pathlib import Path

import tiercache.kernels.cuda
from tests.kernels.shim.device import compiled
from tiercache.kernels.cuda.launch import source

if __name__ == "__main__" and shutil.which("g++"):
    for path in sorted(Path(tiercache.kernels.cuda.__file__).parent.glob("*.cu")):
        compiled(source(path.stem))
