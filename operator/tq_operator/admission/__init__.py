"""Pure: an AdmissionReview -> its answer. Validation of queues, injection into pods. No I/O."""
