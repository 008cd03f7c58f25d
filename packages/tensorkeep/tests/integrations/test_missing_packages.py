"""Without its framework, an integration raises an error with the command that installs it."""

import importlib
import sys

import pytest

import tensorkeep


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate", "torchtitan"])
def test_a_missing_framework_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"tensorkeep.integrations.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for each in [name, *(each for each in sys.modules if each.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, each, None)
    with pytest.raises(
        tensorkeep.MissingExtraError, match=rf"needs {name}>=[\d.]+ .*\npip install '{name}>="
    ) as caught:
        importlib.import_module(module)
    assert isinstance(caught.value, ImportError) and caught.value.kind == "missing-extra"
    assert module not in sys.modules
