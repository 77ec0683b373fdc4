"""Ray actors for the roles: where they run, how they are called, and how their failures reach the driver."""
