"""What the files of a model version may be called and contain: for the publisher and the registry alike.

Pure functions of names and bytes. The publisher asks before it sends anything, the registry before it makes a
version of what was sent.
"""
