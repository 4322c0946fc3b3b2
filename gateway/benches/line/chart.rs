//! Curves over time, as text and as a picture.

use std::fmt::Write as _;

use crate::stats::median;

const COLUMNS: usize = 72;
const ROWS: usize = 8;
/// Of the picture and of each curve in it, in pixels.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 160.0;
const MARGIN: f64 = 40.0;

/// Values taken at equal distances of time.
pub(crate) struct Curve {
    pub(crate) name: &'static str,
    pub(crate) values: Vec<f64>,
}

impl Curve {
    fn top(&self) -> f64 {
        self.values.iter().copied().fold(1.0, f64::max)
    }

    /// Columns whose heights are the medians of what they stand for, from 0 to the greatest value.
    pub(crate) fn text(&self) -> String {
        let columns = self.values.chunks(self.values.len().div_ceil(COLUMNS).max(1));
        let heights: Vec<f64> =
            columns.map(|column| median(column.iter().copied()) / self.top() * ROWS as f64).collect();
        let mut text = format!("{}, up to {:.1} MB\n", self.name, self.top());
        for row in (0..ROWS).rev() {
            let line: String =
                heights.iter().map(|height| if *height > row as f64 + 0.5 { '#' } else { ' ' }).collect();
            let _ = writeln!(text, "|{}", line.trim_end());
        }
        let _ = writeln!(text, "+{}", "-".repeat(heights.len()));
        text
    }

    fn svg(&self, top: f64, picture: &mut String) {
        let step = WIDTH / self.values.len().max(2) as f64;
        let points: Vec<String> = (self.values.iter().enumerate())
            .map(|(at, value)| {
                format!(
                    "{:.1},{:.1}",
                    MARGIN + at as f64 * step,
                    top + HEIGHT - value / self.top() * (HEIGHT - MARGIN / 2.0)
                )
            })
            .collect();
        let (right, bottom) = (MARGIN + WIDTH, top + HEIGHT);
        let _ = write!(
            picture,
            r##"<text x="{MARGIN}" y="{:.0}">{}, up to {:.1} MB</text>
<path d="M{MARGIN},{top}V{bottom}H{right}" stroke="#888"/>
<polyline points="{}" stroke="#06c"/>
"##,
            top - 6.0,
            self.name,
            self.top(),
            points.join(" ")
        );
    }
}

/// All curves, one below the other, each from 0 to its greatest value.
pub(crate) fn svg(title: &str, curves: &[Curve]) -> String {
    let (width, height) = (WIDTH + 2.0 * MARGIN, MARGIN + curves.len() as f64 * (HEIGHT + MARGIN));
    let mut picture = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" fill="none">
<style>text {{ fill: #888 }}</style>
<text x="{MARGIN}" y="20">{title}</text>
"##
    );
    for (number, curve) in curves.iter().enumerate() {
        curve.svg(MARGIN * 1.5 + number as f64 * (HEIGHT + MARGIN), &mut picture);
    }
    picture + "</svg>\n"
}
