//! Plots as SVG, drawn by `plotters` into a text: curves of runs and the figures of the
//! experiments.

use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

/// Style of a plot: lines, or bars in groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlotStyle {
    /// Lines of many points.
    Curves,
    /// Lines of few points, each with a dot and its value.
    Dots,
    /// Bars side by side, each with its value. `x` counts places from 0.
    Bars,
}

/// Points that share a name and a colour.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    pub(crate) name: String,
    /// Points by x. A y that is not finite interrupts a line.
    pub(crate) points: Vec<(f64, f64)>,
    /// Whether the series is the reference of the others; it is grey and dashed.
    pub(crate) ideal: bool,
}

/// A plot; `width` and `height` are in pixels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plot<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) look: PlotStyle,
    /// Whether x and y are logarithmic; all values on a logarithmic axis are above 0.
    pub(crate) log: [bool; 2],
    /// Whether a linear y axis begins at 0.
    pub(crate) from_zero: bool,
    /// Names of the places of bars; `|` breaks a line.
    pub(crate) places: &'a [String],
    pub(crate) series: &'a [Series],
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawResult<'a> =
    Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

/// Pixels of `plotters` in one pixel of the image, since `plotters` counts in whole pixels.
const FINE: i32 = 4;
const FONT: &str = "system-ui, sans-serif";
const INK: RGBColor = RGBColor(0x24, 0x29, 0x2f);
const GREY: RGBColor = RGBColor(0x57, 0x60, 0x6a);
const GRID: RGBColor = RGBColor(0xe3, 0xe6, 0xea);
/// Size of letters in pixels.
const TEXT: i32 = 13;
/// Height of a line of text in pixels.
const LINE: i32 = 18;

const COLOURS: [RGBColor; 8] = [
    RGBColor(0x1f, 0x6f, 0xb2),
    RGBColor(0xd1, 0x60, 0x3d),
    RGBColor(0x3a, 0x9d, 0x6e),
    RGBColor(0x8c, 0x6b, 0xb1),
    RGBColor(0xb8, 0x86, 0x0b),
    RGBColor(0x1a, 0x9a, 0xa5),
    RGBColor(0xc2, 0x52, 0x8b),
    RGBColor(0x4b, 0x55, 0x63),
];

/// Colour of series `index`; all colours differ.
pub(crate) fn colour(index: usize) -> RGBColor {
    COLOURS.get(index).copied().unwrap_or_else(|| {
        // Multiples of the golden ratio never repeat.
        let (r, g, b) = HSLColor((index as f64 * 0.618_034).fract(), 0.55, 0.42).rgb();
        RGBColor(r, g, b)
    })
}

/// Formats a colour: `#1f6fb2`.
pub(crate) fn hex(colour: RGBColor) -> String {
    format!("#{:02x}{:02x}{:02x}", colour.0, colour.1, colour.2)
}

/// Escapes text for HTML and SVG.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Formats a number with at most four significant digits.
pub(crate) fn short(value: f64) -> String {
    if !value.is_finite() {
        return "-".into();
    }
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")];
    let size = value.abs();
    if size != 0.0 && !(1e-3..1e15).contains(&size) {
        return format!("{value:.1e}").replace(".0e", "e");
    }
    // Four digits are as short as three digits and a unit.
    let fits = |(unit, _): &(f64, &str)| size >= if *unit == 1e3 { 1e4 } else { *unit };
    let (unit, name) = units.into_iter().find(fits).unwrap_or((1.0, ""));
    let scaled = value / unit;
    let before = if scaled == 0.0 { 0 } else { scaled.abs().log10().floor() as i32 };
    let text = format!("{scaled:.*}", (3 - before).max(0) as usize);
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text}{name}")
}

/// Style of an axis.
#[derive(Clone, Copy, Default)]
struct AxisStyle {
    /// Whether the axis is logarithmic.
    log: bool,
    /// Whether the values, if they are few, are the labels of a logarithmic axis.
    labels_values: bool,
    /// Whether the axis begins at zero.
    from_zero: bool,
}

/// One axis: its ends, and the positions of its labels.
struct Axis {
    ends: Range<f64>,
    log: bool,
    ticks: Vec<f64>,
}

impl Axis {
    /// Axis that shows all `values`, with at most `most` labels.
    fn of(values: &[f64], style: AxisStyle, most: usize) -> Self {
        let AxisStyle { log, labels_values: own, from_zero: zero } = style;
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (least, largest) = if least <= largest { (least, largest) } else { (0.0, 1.0) };
        if log && least > 0.0 {
            let mut ticks: Vec<f64> = values.to_vec();
            ticks.sort_by(f64::total_cmp);
            ticks.dedup();
            if !own || ticks.len() > most {
                let powers = least.log10().floor() as i32..=largest.log10().ceil() as i32;
                let all = powers.flat_map(|p| [1.0, 2.0, 5.0].map(|n| n * 10f64.powi(p)));
                ticks = all.filter(|tick| (least * 0.6..=largest * 1.7).contains(tick)).collect();
                if ticks.len() > most {
                    ticks.retain(|tick| tick.log10().fract() == 0.0);
                }
            }
            let low = ticks.first().map_or(least, |tick| tick.min(least));
            let high = ticks.last().map_or(largest, |tick| tick.max(largest));
            let room = (high / low).powf(0.03).max(1.02);
            return Self { ends: low / room..high * room, log, ticks };
        }
        let least = if zero { least.min(0.0) } else { least };
        let span = if largest > least { largest - least } else { largest.abs().max(1.0) * 0.1 };
        let power = 10f64.powf((span / most as f64).log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|n| n * power);
        let step =
            steps.into_iter().find(|step| span / step <= most as f64).unwrap_or(10.0 * power);
        let first = (least / step + 1e-9).floor();
        let count = ((largest / step - 1e-9).ceil() - first).max(1.0) as usize;
        let ticks: Vec<f64> = (0..=count).map(|i| (first + i as f64) * step).collect();
        Self { ends: first * step..(first + count as f64) * step, log: false, ticks }
    }

    /// Axis of the places of bars.
    fn places(count: usize) -> Self {
        Self { ends: 0.0..count.max(1) as f64, log: false, ticks: Vec::new() }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let at = |value: f64| if self.log { value.ln() } else { value };
        let share = (at(*value) - at(self.ends.start)) / (at(self.ends.end) - at(self.ends.start));
        from + (share * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.ends.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        short(*value)
    }
}

/// Style of letters of a size, placed by `at`.
fn text_style(size: i32, colour: &RGBColor, at: Pos) -> TextStyle<'static> {
    (FONT, size * FINE).into_font().color(colour).pos(at)
}

/// Estimated width of a text in pixels; the reader's font is unknown.
fn width_of(text: &str, size: i32) -> i32 {
    text.chars().count() as i32 * size * 11 / 20
}

impl Plot<'_> {
    /// Returns the text of the image.
    pub(crate) fn svg(&self) -> String {
        let mut text = String::new();
        let size = [self.width, self.height].map(|pixels| pixels * FINE as u32);
        self.draw(&SVGBackend::with_string(&mut text, (size[0], size[1])).into_drawing_area())
            .unwrap_or_else(|e| unreachable!("a text takes every drawing: {e}"));
        let head = format!("<svg width=\"{}\" height=\"{}\"", size[0], size[1]);
        let (width, height, title) = (self.width, self.height, escape(self.title));
        let ours = format!(
            "<svg role=\"img\" aria-label=\"{title}\" width=\"{width}\" height=\"{height}\""
        );
        assert!(text.starts_with(&head), "plotters begins with the size");
        text.replacen(&head, &ours, 1)
    }

    fn draw<'a>(&self, root: &Area<'a>) -> DrawResult<'a> {
        root.fill(&WHITE)?;
        let left = Pos::new(HPos::Left, VPos::Center);
        let title = text_style(TEXT + 1, &INK, left).transform(FontTransform::None);
        root.draw(&Text::new(self.title.to_owned(), (12 * FINE, 16 * FINE), title))?;
        let top = self.legend(root)?;
        let (_, below) = root.split_vertically(top * FINE);
        let finite = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
            points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
        };
        let all: Vec<(f64, f64)> =
            self.series.iter().flat_map(|series| finite(&series.points)).collect();
        let (xs, ys): (Vec<f64>, Vec<f64>) = all.into_iter().unzip();
        let dots = self.look == PlotStyle::Dots;
        let style = AxisStyle { log: self.log[0], labels_values: dots, from_zero: false };
        let across = match self.look {
            PlotStyle::Bars => Axis::places(self.places.len()),
            _ => Axis::of(&xs, style, self.width as usize / 60),
        };
        let up = AxisStyle { log: self.log[1], labels_values: false, from_zero: self.from_zero };
        let up = Axis::of(&ys, up, 6);
        let lines = self.places.iter().map(|place| place.split('|').count());
        let lines = lines.max().unwrap_or(1) as i32;
        let (x_labels, y_labels) = (across.ticks.len(), up.ticks.len());
        let (floor, places) = (up.ends.start, across.ends.end);
        let named = i32::from(!self.x.is_empty());
        let mut chart = ChartBuilder::on(&below)
            .margin_right(18 * FINE)
            .margin_left(4 * FINE)
            .x_label_area_size((8 + LINE * (lines + named)) * FINE)
            .y_label_area_size(62 * FINE)
            .build_cartesian_2d(across, up)?;
        let centred = Pos::new(HPos::Center, VPos::Top);
        chart
            .configure_mesh()
            .x_labels(x_labels)
            .y_labels(y_labels)
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID.stroke_width(FINE as u32))
            .axis_style(GREY.stroke_width(FINE as u32))
            .set_all_tick_mark_size(4 * FINE)
            .label_style(text_style(TEXT - 1, &GREY, centred))
            .y_desc(self.y)
            .axis_desc_style((FONT, (TEXT - 1) * FINE).into_font().color(&GREY))
            .draw()?;
        let area = chart.plotting_area().strip_coord_spec();
        let (corner, (wide, tall)) = (area.get_base_pixel(), area.dim_in_pixel());
        let at = |x: i32, y: i32| (corner.0 + x, corner.1 + y);
        let wide = wide as i32;
        let spot = at(wide / 2, tall as i32 + (8 + LINE * lines) * FINE);
        let style = text_style(TEXT - 1, &GREY, centred);
        root.draw(&Text::new(self.x.to_owned(), spot, style))?;
        for (index, place) in self.places.iter().enumerate() {
            let middle = (wide as f64 * (index as f64 + 0.5) / places) as i32;
            for (line, words) in (0..).zip(place.split('|')) {
                let spot = at(middle, tall as i32 + (7 + LINE * line) * FINE);
                let style = text_style(TEXT - 1, &INK, centred);
                root.draw(&Text::new(words.to_owned(), spot, style))?;
            }
        }
        // An ideal line is above the other lines, so their values are below them.
        let below = self.series.iter().any(|series| series.ideal);
        let mut values: Vec<Value> = Vec::new();
        let groups = self.series.len().max(1) as f64;
        // An ideal series lies beneath the others.
        let mut order: Vec<usize> = (0..self.series.len()).collect();
        order.sort_by_key(|&index| !self.series[index].ideal);
        for index in order {
            let series = &self.series[index];
            let colour = if series.ideal { GREY } else { colour(index) };
            let line = colour
                .stroke_width(FINE as u32 * if self.look == PlotStyle::Curves { 3 } else { 4 } / 2);
            let points = finite(&series.points);
            match self.look {
                PlotStyle::Bars => {
                    for (x, y) in points {
                        let begin = x + 0.1 + 0.8 * index as f64 / groups;
                        let bar = [(begin, floor), (begin + 0.74 / groups, y)];
                        chart.draw_series([Rectangle::new(bar, colour.filled())])?;
                        let end = chart.backend_coord(&(begin + 0.37 / groups, y));
                        values.push((end, y, INK));
                    }
                }
                PlotStyle::Curves | PlotStyle::Dots => {
                    for part in series.points.split(|(x, y)| !(x.is_finite() && y.is_finite())) {
                        let points = part.iter().copied();
                        if series.ideal {
                            let dashes = DashedLineSeries::new(points, 6 * FINE, 5 * FINE, line);
                            chart.draw_series(dashes)?;
                        } else {
                            chart.draw_series(LineSeries::new(points, line))?;
                        }
                        // A single point makes no line, so it gets a dot.
                        if let ([point], PlotStyle::Curves) = (part, self.look) {
                            chart.draw_series([Circle::new(*point, 2 * FINE, colour.filled())])?;
                        }
                    }
                    if dots && !series.ideal {
                        for point in points {
                            let dot = Circle::new(point, 7 * FINE / 2, colour.filled());
                            chart.draw_series([dot])?;
                            values.push((chart.backend_coord(&point), point.1, colour));
                        }
                    }
                }
            }
        }
        draw_values(root, &values, below, corner.1 + tall as i32, dots)
    }

    /// Draws the names of several series in their colours. Returns the plot's first y in pixels.
    fn legend<'a>(&self, root: &Area<'a>) -> Result<i32, DrawingAreaErrorKind<std::io::Error>> {
        let (mut x, mut y) = (12, 36);
        if self.series.len() < 2 {
            return Ok(y + 2);
        }
        for (index, series) in self.series.iter().enumerate() {
            let wide = width_of(&series.name, TEXT) + 36;
            if x + wide > self.width as i32 && x > 12 {
                (x, y) = (12, y + LINE);
            }
            let colour = if series.ideal { GREY } else { colour(index) };
            let square = [((x) * FINE, (y - 6) * FINE), ((x + 11) * FINE, (y + 5) * FINE)];
            root.draw(&Rectangle::new(square, colour.filled()))?;
            let left = Pos::new(HPos::Left, VPos::Center);
            let spot = ((x + 16) * FINE, y * FINE);
            root.draw(&Text::new(series.name.clone(), spot, text_style(TEXT, &INK, left)))?;
            x += wide;
        }
        Ok(y + 24)
    }
}

/// A value next to its point: the pixel of the point, or of a bar's end, the value, and its colour.
type Value = ((i32, i32), f64, RGBColor);

/// Draws values at free places, preferably `below` their points. `floor`: lower end of the plot.
fn draw_values<'a>(
    root: &Area<'a>,
    points: &[Value],
    below: bool,
    floor: i32,
    dots: bool,
) -> DrawResult<'a> {
    // Left, right, top and bottom of the occupied places.
    let mut taken: Vec<[i32; 4]> = Vec::new();
    let far = 5 * FINE;
    if dots {
        taken
            .extend(points.iter().map(|((x, y), ..)| [x - far, x + far, y - far + 1, y + far - 1]));
    }
    for &((x, y), value, colour) in points {
        let (text, size) = (short(value), TEXT - 2);
        let (wide, tall) = (width_of(&text, size) * FINE / 2, size * FINE);
        let places = [
            [x - wide, x + wide, y - far - tall, y - far],
            [x - wide, x + wide, y + far, y + far + tall],
        ];
        let order = if below { [1, 0] } else { [0, 1] };
        // The place below the end of a bar is inside of the bar.
        let places = order.iter().take(if dots { 2 } else { 1 }).map(|&side| places[side]);
        let free = |place: &[i32; 4]| {
            let meets = |other: &[i32; 4]| {
                place[0] < other[1]
                    && other[0] < place[1]
                    && place[2] < other[3]
                    && other[2] < place[3]
            };
            place[3] <= floor && !taken.iter().any(meets)
        };
        if let Some(place) = places.clone().find(free) {
            taken.push(place);
            let at = Pos::new(HPos::Center, VPos::Center);
            let middle = (x, (place[2] + place[3]) / 2);
            root.draw(&Text::new(text, middle, text_style(size, &colour, at)))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_keep_what_counts() {
        for (value, text) in [
            (0.0, "0"),
            (0.3 + 1e-17, "0.3"),
            (0.0025, "0.0025"),
            (6e-4, "6e-4"),
            (2.5e-5, "2.5e-5"),
            (-12.5, "-12.5"),
            (9999.0, "9999"),
            (12_345.0, "12.35k"),
            (20_000.0, "20k"),
            (1e6, "1M"),
            (3.2e9, "3.2G"),
            (1e20, "1e20"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    fn ticks(values: &[f64], log: bool, labels_values: bool) -> Vec<f64> {
        Axis::of(values, AxisStyle { log, labels_values, from_zero: false }, 6).ticks
    }

    #[test]
    fn ticks_are_round_and_hold_all_values_between_them() {
        assert_eq!(ticks(&[2.1, 5.5], false, false), [2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(ticks(&[1.0, 2.0, 4.0, 16.0], true, true), [1.0, 2.0, 4.0, 16.0]);
        assert_eq!(ticks(&[0.9, 45.0], true, false), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]);
        assert_eq!(ticks(&[1.0, 1e5], true, false).len(), 6);
        for values in [
            &[0.0, 0.0][..],
            &[3.0],
            &[],
            &[-1e-9, 1e-9],
            &[1e9, 1e9 + 1.0],
            &[f64::from(f32::MIN), f64::from(f32::MAX)],
        ] {
            let axis = Axis::of(values, AxisStyle::default(), 6);
            assert!(axis.ticks.len() >= 2 && axis.ticks.len() < 12, "{values:?} {:?}", axis.ticks);
            assert!(
                values.iter().all(|value| axis.ends.start <= *value && *value <= axis.ends.end),
                "{values:?} {:?}",
                axis.ends
            );
        }
    }

    #[test]
    fn values_of_neighbouring_lines_stand_above_and_below_and_never_on_each_other() {
        let line = |y: f64| Series {
            name: y.to_string(),
            points: vec![(1.0, y), (2.0, 10.0 * y)],
            ideal: false,
        };
        let plot = Plot {
            title: "",
            x: "",
            y: "",
            width: 760,
            height: 360,
            look: PlotStyle::Dots,
            log: [false; 2],
            from_zero: true,
            places: &[],
            series: &[line(50.5), line(51.0), line(51.5), line(95.0)],
        };
        let svg = plot.svg();
        let shown = |value: &str| svg.contains(&format!(">\n{value}\n<"));
        assert!(shown("50.5") && shown("51") && shown("95"), "{svg}");
        assert_eq!(svg.matches(">\n51.5\n<").count(), 1, "the name alone: {svg}");
        assert!(shown("505") && shown("950") && !shown("510"), "{svg}");
    }

    #[test]
    fn a_plot_is_one_image_with_every_name_escaped_and_a_colour_for_each() {
        let name = |i: usize| Series {
            name: format!("<run {i}>"),
            points: vec![(1.0, i as f64 + 1.0), (2.0, f64::NAN)],
            ideal: false,
        };
        let series: Vec<Series> = (0..20).map(name).collect();
        for look in [PlotStyle::Curves, PlotStyle::Dots, PlotStyle::Bars] {
            let plot = Plot {
                title: "a \"title\" & <more>",
                x: "x",
                y: "y",
                width: 480,
                height: 300,
                look,
                log: [false; 2],
                from_zero: false,
                places: &["one|two".into(), "three".into()],
                series: &series,
            };
            let svg = plot.svg();
            assert!(
                svg.starts_with("<svg role=\"img\"") && svg.trim_end().ends_with("</svg>"),
                "{svg}"
            );
            assert!(!svg.contains("<run") && svg.contains("&lt;run 19&gt;"), "{svg}");
            assert_eq!(svg.matches('<').count(), svg.matches('>').count());
        }
        let mut colours: Vec<String> = (0..100).map(|index| hex(colour(index))).collect();
        colours.sort();
        colours.dedup();
        assert_eq!(colours.len(), 100);
    }
}
