"""Real processes killed and stopped at chosen moments of real traffic, and a judge of what that did to memory.

`worker` is one rank's process, `life` holds it from outside, `lane` has a source and two targets and one misfortune
after another, `report` sums up; ``scripts/campaign`` runs it.
"""
