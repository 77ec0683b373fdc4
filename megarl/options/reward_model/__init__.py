"""A model with a scalar head that scores responses: `reward_model`."""
