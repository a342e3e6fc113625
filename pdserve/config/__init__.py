"""Settings: frozen structs (`schema`) and how they are filled (`load`)."""
