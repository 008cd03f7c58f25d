"""The validation loss of a run: on which tokens, and in which batches on which rank."""

from tensorkeep.train.answers import windows_of
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import read_settings
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.evaluate import EvaluationWindows, evaluate
from tensorkeep.train.memory.activations import Activations
from tensorkeep.train.memory.evaluation import LARGEST_TOKENS, evaluation_rows
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.pipeline_parallel import PipelineSettings

_LARGEST_LOGITS = 2**26
"""Of a batch of ``eval.batches``: elements."""


def validation_loss(run: Run) -> float:
    """Return the loss on the validation tokens, of the averaged weights if the run averages them; a collective.

    It is computed as training losses are: in the precision of the run, and by compiled code if the loss is compiled.
    Ranks with data of their own evaluate a part of the windows each; the result is equal on all ranks.
    """
    batches = run.validation.batches(evaluation_rows(_training(run)), part=run.replica, parts=run.replicas)
    with run.average.in_place():
        loss = evaluate(run.model, batches, loss=run.operations.evaluate, world=run.world)
    # Sums of the ranks may differ in the last bits, and decisions depend on this loss.
    return run.world.broadcast(loss)


def validation_windows(config: Config, dataset: Dataset) -> EvaluationWindows:
    """Return the windows of the validation split on which a run is evaluated; they do not depend on its ranks."""
    model, most = config.model, config.eval.tokens
    if config.eval.batches is not None:
        rows = max(1, min(LARGEST_TOKENS, _LARGEST_LOGITS // model.vocab_size) // model.context_length)
        most = config.eval.batches * rows * model.context_length
    return windows_of(dataset, model.context_length, most=most)


def _training(run: Run) -> Activations:
    """Return the activations of a micro-batch of training on this rank."""
    techniques, rows = run.config.techniques, run.config.loop.batch_size
    if "pipeline-parallel" in techniques:
        # Here a batch is all sequences of a step.
        rows //= read_settings(techniques["pipeline-parallel"], PipelineSettings).parts
    return Activations(run.config.model, rows=max(1, rows), on_cuda=run.device.type == "cuda", techniques=techniques)
