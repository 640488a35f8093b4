"""Engines that live in environments of their own, beside Fairway's."""
