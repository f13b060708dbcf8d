"""Whatever moves bytes: the seam (`base`), and what is behind it. Transports do not know each other."""
