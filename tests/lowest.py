"""The lowest version of every requirement of the package, as constraints for pip: python -m tests.lowest."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def lowest(requirement: Requirement) -> str:
    """Return a constraint to the lower bound. Raises ValueError for a requirement without exactly one."""
    found = [one.version for one in requirement.specifier if one.operator == ">="]
    if len(found) != 1:
        raise ValueError(f"{requirement} has no lower bound: write one, such as >=1.0")
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={found[0]}{marker}"


def constraints() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [lowest(Requirement(one)) for one in project["dependencies"]]


if __name__ == "__main__":
    print("\n".join(constraints()))  # noqa: T201 - a command
