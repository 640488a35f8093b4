"""Imported before grpc: tests start processes, and grpc's fork handlers may crash a child before its exec."""

from services.runtime.process import grpc_environment

grpc_environment.prepare()
