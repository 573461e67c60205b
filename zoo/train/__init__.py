"""Training of image classifiers and diffusion transformers.

To follow the training of a classifier, read in this order: `zoo.cli.train_classifier` (command), `zoo.config` and
`settings` (options), `classification` (model, loss, validation), `loop` (steps), `zoo.data` with its modules `sources`,
`plan`, `transforms` and `loader` (batches), `update` (optimizer step), `checkpoint`.
"""
