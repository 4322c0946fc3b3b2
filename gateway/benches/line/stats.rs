//! Medians and percentiles.

/// The median; of an even number the upper of the two in the middle. NaN for nothing.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    percentile(values.into_iter().collect(), 0.5)
}

/// The smallest value that is greater than or equal to the share `rank` (0 to 1) of all. NaN for nothing.
pub(crate) fn percentile(mut values: Vec<f64>, rank: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let at = (values.len() as f64 * rank) as usize;
    values.get(at.min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}
