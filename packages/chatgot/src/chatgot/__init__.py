"""ChatGoT: a compact GPT trainer that reads from top to bottom.

Read it in this order:

1. `chatgot.loop`: the training loop. `chatgot.step.train_step`: one step of it.
2. `chatgot.step.state`: what a step needs. `chatgot.run.setup`: how a run is opened or resumed.
3. `chatgot.model.gpt`: the model. `chatgot.data.batches`: its batches.
4. `chatgot.config.recipes`: complete configurations to start from.
5. `chatgot.techniques`: optimisations of training, each a file that changes a run and proves its effect.
"""
