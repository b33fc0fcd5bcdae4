"""Settings whose allowed values are declared with each field and checked when the settings are created."""
