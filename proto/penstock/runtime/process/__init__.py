"""What processes do for themselves: forks, the sandbox, memory, signs of life."""
