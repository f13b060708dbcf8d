"""Engines that embed KVLink: one leaf each, which knows its engine and nothing of the others."""
