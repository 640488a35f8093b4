"""Allowed names and contents of a model version's files, for the publisher and the registry.

Pure functions of names and bytes. The publisher applies them before it sends anything, the registry before
it creates a version.
"""
