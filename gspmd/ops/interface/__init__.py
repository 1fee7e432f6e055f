"""What every operation does with what it is given: specs, arrays, options; and what it is made of."""
