"""Training of image classifiers and diffusion transformers.

A batch of a classifier passes through these files: `zoo.cli.train_classifier` (command), `zoo.config` and `settings`
(options), `classification` (model, loss, validation), `loop` (steps), `zoo.data` (`__init__`, `sources`, `plan`,
`loader`, `transforms`), `update` (optimizer step), `checkpoint`.
"""
