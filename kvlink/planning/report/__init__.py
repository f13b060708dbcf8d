"""Plans and measurements for people: plots, one self-contained page, and the experiment table."""
