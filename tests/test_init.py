"""The public names, and a test file for every module."""

from __future__ import annotations

from pathlib import Path

import pytest

import starfish


def test_public_names_are_sorted_and_there() -> None:
    """`__all__` names exactly what can be had, each under its own name."""
    assert sorted(starfish.__all__) == sorted(starfish._HOMES)
    for name in starfish.__all__:
        assert getattr(starfish, name) is not None
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        _ = starfish.nothing


def test_functions_are_not_hidden_by_modules() -> None:
    """Importing a module of the same name would replace a public function."""
    assert callable(starfish.prune)
    assert callable(starfish.heal_)
    assert callable(starfish.load)


def test_every_module_has_a_test_file() -> None:
    """tests/test_<module>.py, or one for its package."""
    root = Path(starfish.__file__).parent
    here = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    for path in root.rglob("*.py"):
        module = path.relative_to(root).with_suffix("")
        names = {f"test_{path.stem.strip('_')}", f"test_{module.parts[0].strip('_')}"}
        assert names & (here | {"test_main"}), f"{module} has no test file"
