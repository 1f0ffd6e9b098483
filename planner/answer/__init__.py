"""From finalists to a plan document: plan, explanation, reasons, and why nothing fits."""
