"""ChatGoT: a compact GPT trainer that reads from top to bottom.

Read it in this order:

1. `tensorkeep.train.loop`: the training loop. `tensorkeep.train.step.train_step`: one step of it.
2. `tensorkeep.train.step.state`: what a step needs. `tensorkeep.train.run.setup`: how a run is opened or resumed.
3. `tensorkeep.train.model.gpt`: the model. `tensorkeep.train.data.batches`: its batches.
4. `tensorkeep.train.config.recipes`: complete configurations to start from.
5. `tensorkeep.train.techniques`: optimisations of training, each a file that changes a run and proves its effect.
"""
