//! `onebox plot`: draws the figures of the scripts.

use super::{CommandError, Failable, code, print};
use crate::report::plot::{Plot, PlotStyle, Series};
use files::input;

/// Draw lines `series<TAB>place<TAB>value` of the standard input as SVG.
#[derive(Debug, clap::Args)]
pub(super) struct PlotArgs {
    /// Lines over numbers, or bars in groups
    #[arg(value_enum)]
    look: LookArg,
    /// Title above the plot
    #[arg(long, default_value = "")]
    title: String,
    /// Label below the plot
    #[arg(long, default_value = "")]
    x: String,
    /// Label next to the plot
    #[arg(long, default_value = "")]
    y: String,
    /// Axes that are logarithmic, in a plot of lines
    #[arg(long, value_name = "AXES", value_parser = ["x", "xy"])]
    logarithmic: Option<String>,
    /// Add a line through the first point of the first series, in proportion to x
    #[arg(long)]
    ideal: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum LookArg {
    Lines,
    Bars,
}

pub(super) fn run(args: &PlotArgs) -> Result<(), CommandError> {
    /// Maximum bytes of the input: those of a million lines.
    const LONGEST: u64 = 256 << 20;
    let read = input::whole(std::io::stdin().lock(), LONGEST);
    let text = read.and_then(|bytes| String::from_utf8(bytes).map_err(std::io::Error::other));
    let text = text
        .map_err(|e| CommandError::new(code::IO, format!("cannot read the standard input: {e}")))?;
    let svg = draw(args, &text).fail_with(code::CONFIG)?;
    print(&svg)
}

fn draw(args: &PlotArgs, text: &str) -> Result<String, String> {
    let (mut series, mut places): (Vec<Series>, Vec<String>) = (Vec::new(), Vec::new());
    let log = [args.logarithmic.is_some(), args.logarithmic.as_deref() == Some("xy")];
    for (number, line) in (1..).zip(text.lines()) {
        let bad = |what: &str| format!("line {number}, {line:?}: {what}");
        let fields: Vec<&str> = line.split('\t').collect();
        let [name, place, value] = fields[..] else {
            return Err(bad("expected series, place and value, with tabs between them"));
        };
        let known = series.iter().position(|known| known.name == name);
        let row = known.unwrap_or_else(|| {
            series.push(Series { name: name.to_owned(), ..Series::default() });
            series.len() - 1
        });
        let x: f64 = match args.look {
            LookArg::Lines => {
                place.parse().map_err(|_| bad("the place of a line must be a number"))?
            }
            LookArg::Bars => {
                let known = places.iter().position(|known| known == place);
                known.unwrap_or_else(|| {
                    places.push(place.to_owned());
                    places.len() - 1
                }) as f64
            }
        };
        // `-` stands for a missing value.
        if value != "-" {
            let y: f64 = value.parse().map_err(|_| bad("the value must be a number, or -"))?;
            if log[0] && x <= 0.0 || log[1] && y <= 0.0 {
                return Err(bad("a logarithmic axis has no place for it: it is not above 0"));
            }
            series[row].points.push((x, y));
        }
    }
    if let (true, Some(first)) = (args.ideal, series.iter().find_map(|s| s.points.first().copied()))
    {
        let mut xs: Vec<f64> = series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let points = xs.into_iter().map(|x| (x, first.1 * x / first.0)).collect();
        series.push(Series { name: "ideal".into(), points, ideal: true });
    }
    let plot = Plot {
        title: &args.title,
        x: &args.x,
        y: &args.y,
        width: 760,
        height: 360,
        look: if args.look == LookArg::Bars { PlotStyle::Bars } else { PlotStyle::Dots },
        log,
        from_zero: true,
        places: &places,
        series: &series,
    };
    Ok(plot.svg())
}
