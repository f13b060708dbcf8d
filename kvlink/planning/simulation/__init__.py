"""Discrete-event simulation of co-located and split fleets.

`scenario` says what is simulated, `run` runs it: a `fleet` of `worker` engines, each with its KV `space`, through which
every request goes as a `flight`; `happenings` disturb it and `results` sum it up.
"""
