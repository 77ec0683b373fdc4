"""From a training layout to an inference layout: the plan as data, its proof, its price; then what carries it out."""
