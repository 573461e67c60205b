"""Arena: small tasks on which the order or the form of a mixer can matter, for one small network.

`tasks` and `flow` draw the examples, `model` is the network, `race` trains and scores, `report` makes table and figure.
"""
