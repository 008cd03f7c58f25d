"""How the errors of calls read on the command line."""

from pathlib import Path

import torch

import tensorkeep
from cli.calls import Call
from tensorkeep.cli.errors import as_failure
from tensorkeep.cli.main import main
from tensorkeep.testing.cases import case


def test_remedies_name_options_instead_of_keywords() -> None:
    for remedy, shown in (
        ("replace it (overwrite=True)", "replace it (--overwrite)"),
        ("leave it out (drop_metadata=True)", "leave it out (--drop-metadata)"),
        ('give mode="min" or mode="max"', "give --mode min or --mode max"),
        ('metric="val loss"', "--metric 'val loss'"),
        ('allow them: allow=["a.B", "numpy"]', "allow them: --allow a.B --allow numpy"),
        ("give it save_when=EverySteps(100)", "give it save_when=EverySteps(100)"),
        (None, None),
    ):
        with case(remedy):
            failure = as_failure(tensorkeep.UsageError("wrong", remedy=remedy))
            assert failure.remedy == as_failure(failure).remedy == shown


def test_a_remedy_works_when_it_is_followed(tmp_path: Path, call: Call) -> None:
    source, destination = str(tmp_path / "a"), str(tmp_path / "b")
    tensorkeep.save({"w": torch.ones(1)}, source)
    call("convert", source, destination)
    shown = call("convert", source, destination, code=6)
    assert shown.err.endswith("choose another path, or replace it (--overwrite)\n")
    assert main(["convert", source, destination, "--overwrite"]) == 0
