"""Conformance kits: abstract test classes that plugin authors subclass."""
