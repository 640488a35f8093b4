"""Prefill and decode on replicas of their own, against both on each."""
