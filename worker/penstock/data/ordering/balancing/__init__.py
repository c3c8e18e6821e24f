"""Balance of cost: assignment of rows (samples) to steps and boxes by their costs."""
