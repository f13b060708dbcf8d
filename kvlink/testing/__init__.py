"""Public tools for tests: the transport conformance kit and a virtual clock. Nothing of KVLink imports this room."""
