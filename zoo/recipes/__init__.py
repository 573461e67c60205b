"""All stages in a row, from a softmax run to an evaluated linear model: settings, kinds of models, stages, reports."""
