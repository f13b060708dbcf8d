"""KVLink's version: what peers are told, and what the package is published under."""

VERSION = "0.1.0"
