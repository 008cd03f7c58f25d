"""The direction of a metric by its name, and which metric is meant when none is named."""

import pytest

from tensorkeep import UsageError
from tensorkeep.runs.steps import direction, usual_metric
from tensorkeep.testing.cases import case

NAMES = {
    "min": "loss val_loss eval/loss valLoss validation_loss train.loss perplexity val_ppl top1_error wer"
    " MSE rmse loss_0 bpb",
    "max": "acc accuracy val_acc top1_accuracy acc@5 acc5 f1 macro_f1 F1 bleu bleu4 rougeL rouge1 auc roc_auc mAP"
    " map50 r2 mean_reward eval/accuracy",
    None: "score lr step accumulated accuracy_loss neg_mse negative_loss loss_scale mapping rank format"
    " tokens_per_second",
}


def test_the_direction_of_a_metric_by_its_name() -> None:
    for mode, names in NAMES.items():
        assert {name: direction(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_the_metric_that_is_meant() -> None:
    for usual, names in [
        *((None, []), ("score", ["score"]), ("loss", ["loss", "accuracy"]), ("val_loss", ["loss", "val_loss"])),
        ("eval/loss", ["train/loss", "eval/loss", "eval/accuracy"]),
    ]:
        with case(names):
            assert usual_metric(names) == usual
    with pytest.raises(UsageError, match=r"several metrics: a_loss, b_loss\n.*metric=\"a_loss\"$"):
        usual_metric(["b_loss", "a_loss"])
