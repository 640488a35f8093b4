"""Safety packs: what they let through, what they cost, and that a lost worker changes nothing."""
