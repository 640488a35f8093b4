"""Imported before grpc: tests start processes, and grpc's fork handlers may crash a child before its exec."""

from services.__main__ import prepare_grpc

prepare_grpc()
