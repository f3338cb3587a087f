//! The few SVG elements that the picture needs.

use std::fmt::Write as _;

/// SVG elements in the order of painting.
#[derive(Debug, Default)]
pub(super) struct Canvas {
    body: String,
}

/// Position of a text relative to its point.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
}

impl Canvas {
    pub(super) fn rect(&mut self, at: (f64, f64), size: (f64, f64), style: &str) {
        let ((x, y), (w, h)) = (at, size);
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" {style}/>"
        );
    }

    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), style: &str) {
        let _ = writeln!(
            self.body,
            "<path d=\"M{:.1} {:.1}L{:.1} {:.1}\" fill=\"none\" {style}/>",
            from.0, from.1, to.0, to.1
        );
    }

    /// A curve that hangs below the line between two points.
    pub(super) fn arc(&mut self, from: (f64, f64), to: (f64, f64), depth: f64, style: &str) {
        let ((x0, y0), (x1, y1)) = (from, to);
        let _ = writeln!(
            self.body,
            "<path d=\"M{x0:.1} {y0:.1}C{x0:.1} {:.1} {x1:.1} {:.1} {x1:.1} {y1:.1}\" \
             fill=\"none\" {style}/>",
            y0 + depth,
            y1 + depth
        );
    }

    pub(super) fn text(&mut self, at: (f64, f64), anchor: Anchor, style: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
        };
        let _ = writeln!(
            self.body,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" {style}>{}</text>",
            at.0,
            at.1,
            escaped(text)
        );
    }

    /// A text that reads upwards.
    pub(super) fn upright(&mut self, at: (f64, f64), style: &str, text: &str) {
        let (x, y) = at;
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" \
             transform=\"rotate(-90 {x:.1} {y:.1})\" {style}>{}</text>",
            escaped(text)
        );
    }

    pub(super) fn finish(self, width: f64, height: f64) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             width=\"{width:.0}\" height=\"{height:.0}\" \
             font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{}</svg>\n",
            self.body
        )
    }
}

/// Escapes text, which may come from a file, and drops characters that XML forbids.
fn escaped(text: &str) -> String {
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
