"""The prefix cache: KV that earlier sequences left, found by the names of prompts with the same beginning."""
