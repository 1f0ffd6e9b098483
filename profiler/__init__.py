"""Hardware -> HardwareProfile: measured operators, layers and collectives; cluster discovery."""
