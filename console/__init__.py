"""The operators' web console: pages that the control plane serves, made from its own API.

Every read and change is a call with the credential of the person who is signed in, so that the rules of
access are those of the API. Pages work without scripts; these add updates, charts and the playground.
"""
